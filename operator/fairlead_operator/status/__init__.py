"""Status and conditions of a service, from what is observed. Pure."""
