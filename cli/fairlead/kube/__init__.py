"""Commands on a cluster: `kubectl fairlead status | top | explain`, also available as `fairlead …`. They write nothing.

`api` reads with the user's own credentials. `snapshot` and `live` gather the data of the tables, which `table` and `top` print. `facts`
and `explain` find why a service is not ready.
"""
