"""This file makes pytest put its folder on the import path, for the helpers that the wings' tests share."""
