"""`fairlead convert`: manifests with the field names of an earlier commit, in those of this one."""
