//! The ops. One file each: builder method with its contract, backward rule, CPU kernel.

pub(crate) mod activation;
pub(crate) mod arith;
pub(crate) mod attention;
pub(crate) mod broadcast;
pub(crate) mod causal_conv1d;
pub(crate) mod conv;
pub(crate) mod dropout;
pub(crate) mod experts;
pub(crate) mod gather;
pub(crate) mod layout;
pub(crate) mod linear;
pub(crate) mod loss;
pub(crate) mod lru;
pub(crate) mod lstm;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod optim;
pub(crate) mod reduce;
pub(crate) mod relative_bias;
pub(crate) mod route;
pub(crate) mod selective_scan;
pub(crate) mod softmax;
pub(crate) mod swiglu;
