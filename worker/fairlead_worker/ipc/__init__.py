"""Messages between the API process and the engine process, and the sockets that carry them."""
