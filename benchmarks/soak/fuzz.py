"""The fuzz of the server's tests with many more messages: every one is answered, and other clients are served."""
