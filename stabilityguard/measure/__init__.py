"""Reading what a step produced: gradients by layer, the loss, the batch."""
