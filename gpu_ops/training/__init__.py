"""What a training loop needs beside the ops: loss scaling, parameters in one buffer, data, saved states."""
