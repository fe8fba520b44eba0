"""Redis users and passwords: one user per service and role, derived from keys in the operator's own Secret, created on every Redis node."""
