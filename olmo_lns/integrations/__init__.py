"""One folder per framework: the schemes in it, by the framework's own extension points if it has some."""
