"""Many workers of one study."""
