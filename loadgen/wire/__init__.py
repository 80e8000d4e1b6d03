"""The load on sockets: sent and stamped now, parsed later."""
