"""The shipped recipes, one YAML file each, and the functions that make what some of them start from."""
