from fairlead.main import main

main()
