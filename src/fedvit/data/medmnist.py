"""Names that MedMNIST's files do not contain: which datasets exist, and what their labels mean (medmnist.com)."""

ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left", "lung-right",
    "pancreas", "spleen",
)  # fmt: skip
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
        "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
    ),
    "chestmnist": (  # several labels per image
        "atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax",
        "consolidation", "edema", "emphysema", "fibrosis", "pleural thickening", "hernia",
    ),
    "dermamnist": (
        "actinic keratoses", "basal cell carcinoma", "benign keratosis", "dermatofibroma", "melanoma",
        "melanocytic nevi", "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("grade 0", "grade 1", "grade 2", "grade 3", "grade 4"),
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        "basophil", "eosinophil", "erythroblast", "immature granulocyte", "lymphocyte", "monocyte", "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "collecting duct, connecting tubule", "distal convoluted tubule", "glomerular endothelial cell",
        "interstitial endothelial cell", "leukocyte", "podocyte", "proximal tubule segment", "thick ascending limb",
    ),
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
}  # fmt: skip


def medmnist_name(stem: str) -> str | None:
    """Return the MedMNIST dataset that a file's name stands for, at any size (pathmnist, pathmnist_64), or None."""
    name = stem.partition("_")[0].lower()
    return name if name in CLASSES else None
