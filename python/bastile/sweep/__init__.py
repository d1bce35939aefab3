"""`bastile sweep`: whole models, forward and backward, over sequence lengths, beside other implementations."""
