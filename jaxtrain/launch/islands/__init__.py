"""`jaxtrain launch islands`: a process for each island of this machine, and the server beside them."""
