-- A slot's blocks are in doubt, however that was found. ARGV: slot (2 bytes). Returns {1}, or {0} when it is not live.
return { cast_doubt(KEYS[1], ARGV[1]) and 1 or 0 }
