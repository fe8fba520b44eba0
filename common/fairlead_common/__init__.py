"""What several packages share and no index is: prompts, API protocols, HTTP limits. Imports no other package of Fairlead."""
