"""The life of one request, from its route to the answer."""
