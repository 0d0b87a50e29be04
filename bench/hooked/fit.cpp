// llama.cpp's own fit behind a C interface.  It is not part of libllama: built with common/{fit,log,json}.cpp of the
// sources that the installed llama.cpp was built from, whose headers have its structs.
#include "fit.h"

bool tty_can_use_colors() { return false; }  // of common/common.cpp, which has nothing else that these files need

// 0: `model` and `context` were changed so that the model fits with `margin` bytes left on each device, where the
// arrays of tensor_split and overrides have what llama.cpp writes there; 1: nothing was found that fits; 2: an error.
extern "C" int fit_params(const char *path, void *model, void *context, float *tensor_split, void *overrides,
                          size_t margin) {
    auto *given = static_cast<llama_model_params *>(model);
    auto *written = static_cast<llama_model_tensor_buft_override *>(overrides);
    std::vector<size_t> margins(llama_max_devices(), margin);
    given->tensor_split = tensor_split;
    const auto status = common_fit_params(path, given, static_cast<llama_context_params *>(context), tensor_split,
                                          written, margins.data(), 4096, nullptr, GGML_LOG_LEVEL_ERROR);
    given->tensor_buft_overrides = written;
    return status;
}
