"""What people type: `fairlead up`, `demo`, `bench serve`, `make-model`, `status`.

May import every room.
"""
