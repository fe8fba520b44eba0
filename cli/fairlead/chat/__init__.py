"""`fairlead chat`: a conversation with any OpenAI-compatible server at the terminal."""
