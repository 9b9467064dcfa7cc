"""UCM adapter for TensorRT-LLM. ``ucm_trtllm.connector`` holds the two classes that the engine is told."""
