"""OLMo's Trainer without an OLMo checkout: `olmo-lns train`."""
