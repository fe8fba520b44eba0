"""Redis: access, ACL rules, connections, failover and scripts."""
