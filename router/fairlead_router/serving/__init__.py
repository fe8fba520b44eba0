"""What happens to a request: admitted or held, sent, answered, sent again, charged."""
