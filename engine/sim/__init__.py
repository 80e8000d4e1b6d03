"""A runner that only takes time, on a virtual clock."""
