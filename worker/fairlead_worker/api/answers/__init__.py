"""What the API answers: JSON objects as structs, which handlers fill and `reference/` describes."""
