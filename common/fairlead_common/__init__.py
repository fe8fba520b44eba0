"""Code shared by several packages: prompts, API protocols, HTTP limits. Imports no other package of Fairlead."""
