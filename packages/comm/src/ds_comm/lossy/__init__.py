"""Communication that sends less than it was given: quantized, in two levels, or one bit an element with what is lost sent later."""
