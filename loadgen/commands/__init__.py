"""The commands of vtune bench and vtune simulate."""
