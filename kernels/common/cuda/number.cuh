// A number that a call passes by value, or in an array on the device.
#pragma once

struct Number { double value; int kind, unused; };
enum Kind { kValue, kInt32, kInt64, kFloat32, kFloat64, kFurther };

__device__ __forceinline__ double number(const Number& n, const void* array) {
    switch (n.kind) {
        case kInt32: return *static_cast<const int*>(array);
        case kInt64: return double(*static_cast<const long long*>(array));
        case kFloat32: return *static_cast<const float*>(array);
        case kFloat64: return *static_cast<const double*>(array);
        default: return n.value;
    }
}
