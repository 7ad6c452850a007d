"""The networks that DeepFaceLab brings: S3FD finds faces, FAN their landmarks, XSeg draws masks."""
