// Devices without memory: the backends of the peer's planner.
//
// A device allocates addresses in a span of its own; the real CPU backend answers its supports_op queries
// where `asks_cpu` is set, else it supports everything.
#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace peers {

constexpr uintptr_t DEVICE_SPAN = uintptr_t(1) << 44;  // addresses of one device
constexpr size_t RESIDENT_SIZE = size_t(1) << 42;      // of its buffer of weights, and of its caches

struct Device {
    ggml_backend_device device = {};
    ggml_backend_buffer_type type = {};
    ggml_backend backend = {};
    std::string name;
    bool is_host = false;
    size_t alignment = 0;
    uintptr_t next = 0;  // where the next buffer's addresses begin
    ggml_backend_buffer_t weights = nullptr, caches = nullptr;
};

inline Device &of(ggml_backend_buffer_type_t type) { return *static_cast<Device *>(type->context); }
inline Device &of(ggml_backend_dev_t device) { return *static_cast<Device *>(device->context); }

inline ggml_backend_buffer_t new_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_i slots = {};
    slots.free_buffer = [](ggml_backend_buffer_t) {};
    slots.get_base = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    void *base = reinterpret_cast<void *>(of(type).next);
    of(type).next += (size + 8191) / 4096 * 4096;
    return ggml_backend_buffer_init(type, slots, base, size);
}

// Two of them, because releases differ in the slot's type.
inline ggml_status compute_nothing(ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_SUCCESS; }
[[maybe_unused]] inline ggml_status compute_nothing(ggml_backend_t, ggml_cgraph *, int) { return GGML_STATUS_SUCCESS; }

inline void open_device(Device &d, int index, int count, size_t alignment, bool asks_cpu = false) {
    d.is_host = index == count - 1;
    d.name = d.is_host ? "CPU" : "GPU" + std::to_string(index);
    d.alignment = alignment;
    d.next = DEVICE_SPAN * (index + 1);
    d.device.context = d.type.context = d.backend.context = &d;
    d.type.device = d.backend.device = &d.device;

    auto &dev = d.device.iface;
    dev.get_name = dev.get_description = [](ggml_backend_dev_t x) { return of(x).name.c_str(); };
    dev.get_type = [](ggml_backend_dev_t x) {
        return of(x).is_host ? GGML_BACKEND_DEVICE_TYPE_CPU : GGML_BACKEND_DEVICE_TYPE_GPU;
    };
    dev.get_buffer_type = [](ggml_backend_dev_t x) { return &of(x).type; };
    dev.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    if (asks_cpu)
        dev.supports_op = [](ggml_backend_dev_t, const ggml_tensor *op) {
            static ggml_backend_dev_t cpu = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
            return ggml_backend_dev_supports_op(cpu, op);
        };
    dev.supports_buft = [](ggml_backend_dev_t x, ggml_backend_buffer_type_t t) { return &of(x).type == t; };

    d.type.iface.get_name = [](ggml_backend_buffer_type_t t) { return of(t).name.c_str(); };
    d.type.iface.get_alignment = [](ggml_backend_buffer_type_t t) { return of(t).alignment; };
    d.type.iface.alloc_buffer = new_buffer;

    d.backend.iface.get_name = [](ggml_backend_t b) { return static_cast<Device *>(b->context)->name.c_str(); };
    d.backend.iface.free = [](ggml_backend_t) {};
    d.backend.iface.graph_compute = compute_nothing;

    d.weights = new_buffer(&d.type, RESIDENT_SIZE);
    d.weights->usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    d.caches = new_buffer(&d.type, RESIDENT_SIZE);
}

inline void close_device(Device &d) {
    ggml_backend_buffer_free(d.weights);
    ggml_backend_buffer_free(d.caches);
}

template <typename F> double microseconds(F &&work) {
    auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace peers
