from fairlead.scripts import fairlead

fairlead()
