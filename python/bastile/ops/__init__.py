"""The operators, one module each: functions with autograd, and the modules built on them."""
