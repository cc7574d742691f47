"""A package that adds a model, data, an optimizer, a callback and a tracker to jaxtrain's config."""
