"""What goes to the Hugging Face hub, and what comes back from there."""
