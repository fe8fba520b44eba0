"""Who asks and what each tenant may have: keys, token rates, room for bodies, and what answers used."""
