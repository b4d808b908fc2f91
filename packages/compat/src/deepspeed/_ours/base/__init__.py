"""What all other folders of the facade use: errors, versions, attribute readers, helpers of `deepspeed.runtime.utils`."""
