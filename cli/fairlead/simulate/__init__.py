"""`fairlead simulate`: a recorded trace on modelled pods, with Fairlead's routing and with other routers' policies."""
