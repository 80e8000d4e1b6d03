"""One file per kind of server, and the table of them."""
