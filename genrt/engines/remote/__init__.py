"""An engine on another machine, over HTTP."""
