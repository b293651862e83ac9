"""The commands of `ane-layers`, by subject; heavy imports wait until a command needs them."""
