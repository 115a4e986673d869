"""Where the sites are in a given library: one small file per model family. Adapters point, they never compute."""
