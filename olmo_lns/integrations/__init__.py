"""Each folder brings the schemes to one framework, by that framework's own means where it has some."""
