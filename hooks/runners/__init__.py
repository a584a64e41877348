"""Start an engine on a checkpoint and dump its forward."""
