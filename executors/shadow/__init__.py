"""The live side of `twin serve --shadow`: what the simulation beside it is told, and what is made of its answers."""
