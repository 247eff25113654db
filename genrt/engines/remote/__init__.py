"""An engine elsewhere, asked over HTTP."""
