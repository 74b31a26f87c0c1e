"""The scaling study: config pack checks, plan, launch, collect and report."""
