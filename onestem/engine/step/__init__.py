"""One step: whose rows stand in it, what they read, what comes of them."""
