"""`fairlead check`: can a model be served, how, and with how much memory?"""
