"""`fairlead simulate`: a recorded trace against modelled pods, under our score and under the policies of others."""
