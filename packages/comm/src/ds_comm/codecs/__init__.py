"""Communication that sends less than it was given: quantized, in two levels, or as signs with what is lost sent later."""
