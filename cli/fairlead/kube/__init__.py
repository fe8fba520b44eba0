"""What people ask a cluster: `kubectl fairlead status | top | explain`, and the same as `fairlead …`.

`api` reads with the user's own credentials; `picture` and `live` put together what a table needs, `table` and `top` show it; `facts` and
`explain` say in words why a service is not ready. Nothing here writes.
"""
